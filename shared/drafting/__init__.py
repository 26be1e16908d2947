"""Draft tokens of one sequence, from one source or several, before it is known how many of them are verified."""
