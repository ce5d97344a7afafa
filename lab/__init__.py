"""What measures and shows. All else works without it."""
import common       # before torch: see there
