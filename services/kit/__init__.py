"""What every service needs and nothing else."""
