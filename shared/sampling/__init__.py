"""Sampling: what turns a step's logits into tokens, losslessly, with or without a draft.

Request filters (`filters`), the two verification rules (`rejection` and `coupled`), the log-probabilities
reported to clients (`logprobs`), and the values that cross their seams (`params`, `proposal`, `rows`,
`sampled`, `token_counts`). Pure functions of tensors and small Python values; draft and target workers both use them.

May import torch and the standard library, and nothing of ours outside this folder.
"""
