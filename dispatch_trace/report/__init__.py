"""What people read: text for a terminal. Takes plain data from below, prints nothing itself."""
