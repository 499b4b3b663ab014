"""The tiny DeepSeek-V4 that ships with the package: its corpus, tokenizer, baseline, configuration and training.

A model of the official architecture in the official layout, small enough to live in the package, that has learnt one
thing: the Python of the standard library. Everything that made it is here:

python -m dspark_jax.training.tiny_v4 corpus --out corpus.npz            # files, tokenizer, tokens
python -m dspark_jax.training.tiny_v4 ngram --corpus corpus.npz          # the baseline it has to beat
python -m dspark_jax.training.tiny_v4 target --corpus corpus.npz --out tiny-v4 --minutes 8   # on a GPU
python -m dspark_jax.training.tiny_v4 evaluate --corpus corpus.npz --checkpoint tiny-v4
python -m dspark_jax.training.tiny_v4 prompts --corpus corpus.npz --out prompts.jsonl        # held-out beginnings
python -m dspark_jax.training.tiny_v4 domain --out domain                                    # C, to fine-tune on
"""
