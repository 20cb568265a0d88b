"""From requests to results: engine, public API, tokenizer, text."""
