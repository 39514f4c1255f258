"""What live sessions need of the engine: contexts that are ready before they are asked about, and that go on
when a part of them is dropped."""
