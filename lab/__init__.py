"""What measures and shows. Everything else works without this folder."""
