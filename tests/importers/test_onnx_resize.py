"""ONNX's Resize: wherever elements are, in any dims, as onnx's reference evaluator has it."""

import numpy as np
import pytest
import torch

import mesh_tensor as mt

from .test_frontends_onnx import save

RANDOM = np.random.default_rng(5)
IMAGE = RANDOM.standard_normal((2, 3, 5, 7)).astype("float32")
NONE = np.zeros(0, "float32")
CROP = np.float32([0, 0, 0.1, 0.2, 1, 1, 0.8, 1.2])


def scaled(*scales, crop=NONE):
    return {"roi": crop, "scales": np.float32(scales)}


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        (scaled(1, 1, 1.3, 0.6), {"mode": "nearest"}),
        (scaled(1, 1, 1.3, 0.6), {"mode": "nearest", "nearest_mode": "floor"}),
        (
            scaled(1, 1, 0.7, 2),
            {"mode": "nearest", "nearest_mode": "ceil", "coordinate_transformation_mode": "asymmetric"},
        ),
        (scaled(1, 2, 1, 2), {"mode": "nearest", "nearest_mode": "round_prefer_ceil"}),
        (scaled(1, 1, 1.3, 0.6), {"mode": "linear"}),
        (scaled(1, 2, 2, 1), {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}),
        (scaled(1, 1, 1.3, 0.6), {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"}),
        (scaled(1, 1, 0.6, 2), {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
        (scaled(1, 1, 2, 3), {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        (scaled(2, 2), {"mode": "linear", "axes": [2, 3]}),
        (scaled(1, 1, 1.3, 0.6), {"mode": "cubic"}),
        (scaled(1, 1, 0.6, 1.5), {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}),
        (
            scaled(1, 1, 1.6, 1, crop=CROP),
            {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0},
        ),
    ],
)
def test_resize(tmp_path, weights, options):
    (expected,) = save(tmp_path / "model.onnx", "Resize", {"x": IMAGE}, weights, opset=19, **options)
    module = mt.from_onnx(tmp_path / "model.onnx", check=False)
    for layout in ({"a": 0}, {"a": 2}):
        run = mt.distribute_module(module, {"a": 2}, {"x": layout}, poison=True)
        torch.testing.assert_close(run(torch.from_numpy(IMAGE)), expected, rtol=1e-5, atol=1e-5)


def test_volumes_of_open_batches(tmp_path):
    """More dims than images have; torch has nearest elements of volumes."""
    volume = RANDOM.standard_normal((2, 3, 4, 5, 6)).astype("float32")
    options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    sizes = {"x": ("batch", 3, 4, 5, 6)}
    save(tmp_path / "model.onnx", "Resize", {"x": volume}, scaled(1, 1, 2, 2, 3), opset=19, sizes=sizes, **options)
    run = mt.distribute_module(mt.from_onnx(tmp_path / "model.onnx"), {"a": 2}, {"x": {"a": 0}})
    x = torch.from_numpy(volume)
    torch.testing.assert_close(run(x), torch.nn.functional.interpolate(x, scale_factor=(2, 2, 3)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "linear", "antialias": 1}, "option 'antialias' is 1"),
        ({"mode": "linear", "exclude_outside": 1}, "linear elements with exclude_outside"),
        (
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            "aligned corners of 5 elements times 1.29",
        ),
    ],
)
def test_what_is_not_settled(tmp_path, options, said):
    save(tmp_path / "model.onnx", "Resize", {"x": IMAGE}, scaled(1, 1, 1.3, 0.6), opset=19, **options)
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.from_onnx(tmp_path / "model.onnx", check=False)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        (("batch", 3, "rows", 7), scaled(2, 1, 2, 1)),
        ((2, 3, "rows", 7), scaled(1, 1, 1.5, 2)),
        ((2, 3, "rows", 7), scaled(1, 2, 2, 1)),
        (("batch", 3, 5, 7), {"roi": NONE, "scales": NONE, "sizes": np.array([4, 3, 5, 7])}),
    ],
)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_open_sizes_that_say_too_little(tmp_path, mode, sizes, weights):
    """TVM's importer knows no scales, and images only."""
    save(tmp_path / "model.onnx", "Resize", {"x": IMAGE}, weights, opset=19, mode=mode, sizes={"x": sizes})
    with pytest.raises(mt.MeshTensorError, match=r"by half_pixel of a tensor of shape(.|\n)*settle its sizes"):
        mt.from_onnx(tmp_path / "model.onnx", check=False)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_open_sizes_of_images(tmp_path, mode):
    sizes = {"x": ("batch", 3, "rows", "columns")}
    save(tmp_path / "model.onnx", "Resize", {"x": IMAGE}, scaled(1, 1, 2, 3), opset=19, mode=mode, sizes=sizes)
    (expected,) = save(tmp_path / "other.onnx", "Resize", {"x": IMAGE}, scaled(1, 1, 2, 3), opset=19, mode=mode)
    module = mt.from_onnx(tmp_path / "model.onnx", check=False)
    torch.testing.assert_close(mt.run_sequential(module.mod, [torch.from_numpy(IMAGE)]), expected)
