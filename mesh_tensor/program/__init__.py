"""Program: the steps of one device. How they are made, checked, and laid beside each other."""
