"""What several tests need: model checkpoints and helpers. May import shared and the local stack."""
