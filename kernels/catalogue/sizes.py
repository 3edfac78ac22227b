"""The sizes to try kernels at.

Even ones come first: all of 2, 3, 4, 6 and 8 divide 24 and 48, while blocks of 8 and 16 divide a tile of them on some
meshes and not on others. Uneven ones follow; in the last of them a dim has fewer elements than most meshes have
devices."""

MNK = ({"M": 48, "N": 24, "K": 48}, {"M": 13, "N": 30, "K": 7}, {"M": 5, "N": 3, "K": 19})
BATCH_MNK = (
    {"batch": 4, "M": 24, "N": 16, "K": 24},
    {"batch": 3, "M": 13, "N": 7, "K": 10},
    {"batch": 5, "M": 1, "N": 9, "K": 3},
)
MN = ({"M": 24, "N": 48}, {"M": 13, "N": 30}, {"M": 3, "N": 7})
MK = ({"M": 24, "K": 48}, {"M": 13, "K": 30}, {"M": 3, "K": 7})
KN = ({"K": 48, "N": 24}, {"K": 30, "N": 13}, {"K": 7, "N": 3})
LMN = ({"L": 8, "M": 12, "N": 24}, {"L": 5, "M": 7, "N": 13}, {"L": 3, "M": 1, "N": 9})
NHWCF = ({"N": 4, "H": 4, "W": 6, "C": 4, "F": 12}, {"N": 3, "H": 5, "W": 4, "C": 3, "F": 5})
