"""Training data: rows of text become examples, and the target's features of them are kept on disk.

An example comes in one of three ways, which have one interface, `example.Examples`, and the same ids at the same step:

- `Batches` over `Documents`: without features; the training step computes them (`features.target_features`);
- `Batches` over a `FeatureCache`: with features, read from a cache that `capture` has written;
- `PassingCache`: with features, of which a part is captured, trained on and deleted after the other.
"""
