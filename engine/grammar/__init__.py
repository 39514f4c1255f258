"""Answers that must have a form: which tokens may come next, and when the form is complete."""
