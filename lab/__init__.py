"""What measures and shows. All else works without it."""
