"""What several tests need: model checkpoints and helpers. May import shared, never services."""
