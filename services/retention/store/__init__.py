"""What retention stores: artifacts and their tombstones, ages and holds, open orders."""
