"""The demo pair's checkpoints and their trainer, which imports torch and transformers only."""
