"""What measures and shows. Everything else works without this folder."""
import common       # before torch: see there
