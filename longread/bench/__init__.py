"""Speed: longread beside dense attention and beside Hugging Face; run by `longread bench`."""
