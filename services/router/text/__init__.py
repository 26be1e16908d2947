"""Text to tokens and back: the tokenizer, its threads, streamed detokenizing, stop strings."""
