"""Training data: rows of text become examples, and the target's features of them are kept on disk."""
