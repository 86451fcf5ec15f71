"""What tasks call."""
