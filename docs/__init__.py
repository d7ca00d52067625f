"""Documentation, and the scripts that write the generated parts of it."""
