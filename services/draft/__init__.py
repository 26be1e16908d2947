"""The draft worker: proposes what its model draws, or copies, for many sequences at once. Imports `shared` only."""
