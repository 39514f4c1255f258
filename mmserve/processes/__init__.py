"""The engine and the detokenizer as processes of their own, and who watches over them."""
