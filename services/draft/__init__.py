"""The draft worker: proposes tokens from the small model, many sequences at once. Imports `shared` only."""
