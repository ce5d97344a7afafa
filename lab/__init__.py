"""lab measures the models and shows the results. All else works without it."""
