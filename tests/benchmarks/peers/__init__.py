"""Other engines on the same models, in turns with the service."""
