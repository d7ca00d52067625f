"""The numbered SQL steps of every service, shipped as package data."""
