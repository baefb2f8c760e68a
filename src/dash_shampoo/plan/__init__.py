"""What Dash will take on given machines, before anything is allocated."""
