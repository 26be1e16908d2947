"""The draft worker: proposes tokens of the small model or of what came before, many sequences at once. Imports `shared` only."""
