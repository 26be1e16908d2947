"""Drafting by the target itself: with heads on what it computes, or with its first layers."""
