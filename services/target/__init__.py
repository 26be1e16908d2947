"""The target worker: prefills prompts and verifies drafts on the large model. Imports `shared` only."""
