"""Slots, pages and the pool of recurrent state."""
