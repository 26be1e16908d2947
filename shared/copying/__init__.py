"""Draft tokens copied from texts: what followed where they occurred before."""
