"""Files that hold no module are refused with what is wrong with them, before TVM sees it."""

import json
import time

import pytest
from tvm import ir

import mesh_tensor as mt
from kernels.combined import one_pass_variance
from mesh_tensor.importers import saved_json, saved_probe
from tests.plan.modules import Heads


def refusal(path, **options):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.load_module(path, **options)
    assert path.name in str(error.value)
    return str(error.value)


def refused_json(path, document):
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return refusal(path)


def module_as_nodes():
    return json.loads(ir.save_json(Heads))


def first(document, type_key):
    return next(index for index, node in enumerate(document["nodes"]) if node["type"] == type_key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "it holds a list, not an object"),
        ("{}", "it has no list `nodes`"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"nodes": [], "nodes": []}', "the key 'nodes' is there twice"),
        ('{"root": 1, "nodes": [], "attrs": {"tvm_version": "0.8.0"}}', "saved by TVM 0.8.0"),
        ('{"root_index": 1, "nodes": [{"type": "None"}]}', "`root_index` is 1, and there are 1 nodes"),
        ('{"root_index": 0, "nodes": [3]}', "node 0 has no type"),
        ('{"root_index": 0, "nodes": [{"type": "int", "data": 3}], "metadata": {}}', "it holds a int"),
        ('{"root_index": 0, "nodes": [{"type": "int", "data": 1e3}]}', r"node 0 (int): its value is '1000.0'"),
        ('{"root_index": 0, "nodes": [{"type": "nope", "data": {}}]}', "node 0 (nope): no type of modules of this TVM"),
    ],
)
def test_json_that_holds_no_module(tmp_path, text, message):
    assert message in refused_json(tmp_path / "module.json", text)


def test_indices_out_of_range_and_cycles(tmp_path):
    document = module_as_nodes()
    count = len(document["nodes"])
    array = first(document, "ffi.Array")
    document["nodes"][array]["data"][0] = count
    assert f"node {array} (ffi.Array): its elements are no nodes" in refused_json(tmp_path / "a.json", document)
    document["nodes"][array]["data"][0] = -1
    assert f"node {array} (ffi.Array): its elements are no nodes" in refused_json(tmp_path / "a.json", document)
    document = module_as_nodes()
    call = first(document, "relax.expr.Call")
    document["nodes"][call]["data"]["args"] = 10**30
    assert f"args is '{10**30}', and there are {count} nodes" in refused_json(tmp_path / "a.json", document)
    document["nodes"][call]["data"]["args"] = len(document["nodes"])
    document["nodes"].append({"type": "ffi.Array", "data": [call]})
    assert "is part of itself" in refused_json(tmp_path / "a.json", document)


def test_all_problems_are_told_but_not_hundreds(tmp_path):
    document = module_as_nodes()
    for node in document["nodes"]:
        if node["type"] == "ir.IntImm":
            node["data"]["value"] = "8"
    text = refused_json(tmp_path / "a.json", document)
    assert text.count("value is '8'") == 5
    assert "more" in text


@pytest.mark.parametrize(
    ("type_key", "field", "value", "message"),
    [
        ("relax.expr.VarBinding", "value", "None", "not the ir.RelaxExpr that it has to be"),
        ("relax.expr.Call", "op", "ffi.Array", "a ffi.Array, not the ir.RelaxExpr"),
        ("relax.expr.Call", "struct_info_", "None", "a None, not the"),
        ("relax.expr.SeqExpr", "blocks", "None", "not the ffi.Array of relax.expr.BindingBlock"),
        ("relax.TensorStructInfo", "ndim", 7, "ndim is 7, and it has 3 sizes"),
        ("relax.TensorStructInfo", "dtype", "float-3", "dtype is 'float-3'"),
        ("ir.IntImm", "value", 2**63, f"value is '{2**63}'"),
        ("ir.IRModule", "functions", "ffi.Map", ""),
    ],
)
def test_fields_that_do_not_fit(tmp_path, type_key, field, value, message):
    document = module_as_nodes()
    node = document["nodes"][first(document, type_key)]
    if isinstance(value, str) and value[0] in "Nf" and field != "dtype":
        value = first(document, value)
    node["data"][field] = value
    if message:
        assert message in refused_json(tmp_path / "a.json", document)
    del node["data"][field]
    assert f"({type_key}): {field} is missing" in refused_json(tmp_path / "a.json", document)


@pytest.mark.parametrize(("size", "message"), [(-4, "a size is -4"), (2**50, "more than any memory")])
def test_sizes_that_no_tensor_has(tmp_path, size, message):
    document = module_as_nodes()
    nodes = document["nodes"]
    shape = nodes[first(document, "relax.TensorStructInfo")]["data"]["shape"]
    nodes[nodes[nodes[shape]["data"]["values"]]["data"][0]]["data"]["value"] = size
    assert message in refused_json(tmp_path / "a.json", document)


def test_deep_and_wide_modules(tmp_path):
    for used, message in ((1, f"more than the {saved_json.DEEPEST}"), (2, f"more than {saved_json.LARGEST} nodes")):
        document = module_as_nodes()
        for _ in range(600 if used == 1 else 60):
            document["nodes"].append({"type": "ffi.Array", "data": [len(document["nodes"]) - 1] * used})
        assert message in refused_json(tmp_path / "a.json", document)


def test_compiled_code_and_calls_of_python_in_a_module(tmp_path):
    """TVM would load the one and call the other."""
    document = module_as_nodes()
    document["nodes"].append({"type": "ffi.Module", "data": "AAAA"})
    assert "(ffi.Module): no type of modules" in refused_json(tmp_path / "a.json", document)
    document["nodes"][-1] = {"type": "ir.EnvFunc", "data": "runtime.os.system"}
    assert "it calls 'runtime.os.system', which no module needs" in refused_json(tmp_path / "a.json", document)


def test_a_tensor_whose_header_lies(tmp_path):
    document = module_as_nodes()
    tensor = document["nodes"][first(document, "ffi.Tensor")]
    kept = tensor["data"]
    for changed in (kept[:-8], "A" + kept[1:], "", None, kept + "====", kept[:40] + "////" + kept[44:]):
        tensor["data"] = changed
        assert "(ffi.Tensor)" in refused_json(tmp_path / "a.json", document)


def test_combinations_of_states_that_nobody_has_tried_here(tmp_path):
    """A kernel in a file may claim that its states combine: only what `save_module` wrote is believed."""
    mod = ir.IRModule({"main": one_pass_variance(8, 16).with_attr("global_symbol", "main")})
    mt.save_module(mod, tmp_path / "ours.json")
    ir.assert_structural_equal(mt.load_module(tmp_path / "ours.json"), mod)
    text = refused_json(tmp_path / "other.json", json.loads(ir.save_json(mod)))
    assert "states how states combine (mt.combine)" in text
    assert "save it with mt.save_module" in text


def test_text_that_is_no_unicode(tmp_path):
    document = module_as_nodes()
    document["nodes"][first(document, "ffi.String")]["data"] = "\ud800"
    assert "text that is no Unicode" in refused_json(tmp_path / "a.json", document)
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{}")
    assert "is no text" in refusal(tmp_path / "a.json")


def test_a_damaged_file_of_ours(tmp_path):
    path = tmp_path / "module.json"
    mt.save_module(Heads, path)
    text = path.read_text()
    document = json.loads(text)
    document["nodes"][first(document, "ir.IntImm")]["data"]["value"] += 1
    assert "is damaged: it is not what its checksum was made of" in refused_json(path, document)
    for name in ("tvm", "sha256"):
        document = json.loads(text)
        document["mesh_tensor"][name] += "x"
        assert "is damaged" in refused_json(path, document)
    document["mesh_tensor"] = {"format": 2}
    message = refused_json(path, document)
    assert "is of format 2" in message
    assert "reads format 1" in message
    document["mesh_tensor"] = "other"
    assert "is of format None" in refused_json(path, document)


def test_what_only_tvm_finds_is_found_in_another_process(tmp_path):
    document = module_as_nodes()
    call = document["nodes"][first(document, "relax.expr.Call")]["data"]
    document["nodes"].append({"type": "ffi.Array", "data": []})
    call["args"] = len(document["nodes"]) - 1
    message = refused_json(tmp_path / "a.json", document)
    assert "holds a module that can't be read" in message
    assert "not well formed" in message


def test_a_module_that_takes_for_ever(monkeypatch):
    monkeypatch.setattr(saved_probe, "PATIENCE", 1)
    monkeypatch.setattr(saved_probe, "look_through", lambda form, text: time.sleep(100))
    assert saved_probe._in_child("json", "").problem == "TVM was not done with it after 1 seconds"


IMPORTS = "from tvm.script import relax as R\nfrom tvm.script import ir as I\n"
NO_NOPE = "why: line 6: module 'tvm.relax.script.parser' has no attribute 'nope'"
MARK = "open({path!r}, 'w').close()"


def test_nothing_is_evaluated_unasked(tmp_path):
    """Text in a .json is no TVMScript, and TVMScript needs trust."""
    text = f"@I.ir_module\nclass A:\n    {MARK.format(path=str(tmp_path / 'mark'))}\n"
    for name in ("a.json", "a.txt", "a.py", "a.tvmscript"):
        (tmp_path / name).write_text(text)
    assert "is no JSON" in refusal(tmp_path / "a.json")
    assert "is no JSON" in refusal(tmp_path / "a.json", trusted=True)
    assert "is no JSON" in refusal(tmp_path / "a.txt", format="json", trusted=True)
    for name in ("a.txt", "a.py", "a.tvmscript"):
        message = refusal(tmp_path / name)
        assert "is TVMScript, which is evaluated like Python" in message
        assert "trusted=True" in message
        assert "mt.save_module" in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:", "is no TVMScript"),
        ("x = '\0'", "is no TVMScript"),
        ("(" * 10_000, "is no TVMScript"),
        (
            "def f():\n    return 1\n\ndef g(:",
            "why: SyntaxError: invalid syntax (line 4: def g(:)\n  fix: correct it there",
        ),
        ("x = 1", "has no @I.ir_module class in it"),
        ("\nraise ValueError('lost')", "has no @I.ir_module class in it\n  why: a decorated class or function is read"),
        ("class A: pass", "fix: write the module as one `@I.ir_module class ...:`"),
        ("@R.function\ndef f(x: R.Tensor((2,), 'float32')):\n    return R.nope(x)\n", "can't be parsed as TVMScript"),
        (f"{IMPORTS}@R.function\ndef f(x: R.Tensor((2,), 'float32')):\n\n    y = R.nope(x)\n    return y\n", NO_NOPE),
        (
            f"{IMPORTS}N = 1 // 0\n\n@I.ir_module\nclass A:\n    pass\n",
            "why: line 3: integer division or modulo by zero",
        ),
        ("@I.ir_module\nclass A: pass\n@I.ir_module\nclass B: pass\n", "holds 2 modules"),
    ],
)
def test_text_that_holds_no_module(tmp_path, text, message):
    path = tmp_path / "module.txt"
    path.write_text(text)
    assert message in refusal(path, trusted=True)


def test_text_that_kills_tvm(tmp_path):
    path = tmp_path / "module.txt"
    text = '@R.function\ndef f(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, None), "float32"):\n    return x\n'
    path.write_text(text)
    assert "dies of it (SIGSEGV)" in refusal(path, trusted=True)


def test_what_is_no_file_or_says_not_what_it_is(tmp_path):
    assert "there is no file" in refusal(tmp_path / "module.json")
    assert "there is no file" in refusal(tmp_path, format="json")
    for call in (mt.load_module, lambda path: mt.save_module(Heads, path)):
        with pytest.raises(mt.MeshTensorError, match="the path is None, which is no path") as error:
            call(None)
        assert "fix: give a text or a pathlib.Path" in str(error.value)
    (tmp_path / "module.bin").write_text("{}")
    message = refusal(tmp_path / "module.bin")
    assert "does not say what it is" in message
    assert "'json', 'tvmscript'" in message
    with pytest.raises(mt.MeshTensorError, match="unknown format 'yaml'"):
        mt.load_module(tmp_path / "module.bin", format="yaml")


def test_what_can_not_be_saved(tmp_path):
    with pytest.raises(mt.MeshTensorError, match=r"does not end in \.json"):
        mt.save_module(Heads, tmp_path / "module.txt")
    with pytest.raises(mt.MeshTensorError, match="can't be written") as error:
        mt.save_module(Heads, tmp_path / "none" / "module.json")
    assert "choose another folder" in str(error.value)
    with pytest.raises(mt.MeshTensorError, match="save_module"):
        mt.save_module(3, tmp_path / "module.json")
    assert not list(tmp_path.iterdir())
