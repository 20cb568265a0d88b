"""What a request may ask of a pick, and the pick itself."""
