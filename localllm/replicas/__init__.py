"""Several engines behind one address, on Ray Serve; needs the extra `ray`."""
