"""What a user sees of a run: metric files, progress, the table at the end."""
