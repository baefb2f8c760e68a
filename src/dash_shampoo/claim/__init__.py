"""The claims of arXiv 2602.02016, each as one command with a report: `dash-shampoo claim NAME`."""
