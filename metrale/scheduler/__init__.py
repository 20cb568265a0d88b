"""Pure policies, the step, and the scheduler that runs them."""
