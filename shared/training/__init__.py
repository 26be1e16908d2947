"""Making drafters: heads of a target, trained on its own distributions."""
