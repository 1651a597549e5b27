"""What is known of published task sets: categories, flaws, what an audit keeps."""
