"""What jobs will need from the network, fetched beforehand."""
