"""Where plugins come from, what stops the start, and that every refusal names plugin, cause and remedy."""

import importlib
import logging
import subprocess
import sys

import pytest

from lmcache.errors import PluginError
from lmcache.geometry.groups import GroupKind
from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.manager import PluginManager
from lmcache.plugins.sources import BUILT_IN


def refusal(names):
    with pytest.raises(PluginError) as refused:
        PluginManager(names)
    return str(refused.value)


def described(manager):
    return {each.name: each for each in manager.describe()}


# ------------------------------------------------------------------------------------------------- where they come from


def test_built_in_plugins_are_there_without_being_asked_for():
    manager = PluginManager()
    assert [each.name for each in manager.describe()] == list(BUILT_IN)
    assert manager.find_policy("LRU") is LRU
    lru = described(manager)["lmcache.plugins.eviction.lru"]
    assert (lru.origin, lru.distribution, lru.policies, lru.adapters, lru.hooks) == (
        "built-in", "", ("LRU",), (), ("lmcache_register_eviction_policies",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "module"),
    [("reference", "lmcache.engines.reference.engine"), ("vllm", "lmcache.engines.vllm.connector")],
)
def test_engine_adapters_are_found_by_engine_name_without_their_engine(engine, module):
    assert PluginManager().find_adapter(engine.upper()).module == module


def test_a_built_in_plugin_has_the_hooks_that_the_list_says_for_it_is_asked_for_no_other():
    hooks = {each.name: set(each.hooks) for each in PluginManager().describe()}
    assert {name for name in BUILT_IN if not hooks[name] <= set(BUILT_IN[name])} == set()
    listed = {hook for hooks in BUILT_IN.values() for hook in hooks}
    assert listed == {hook for each in hooks.values() for hook in each}


def test_a_built_in_plugin_is_imported_when_a_hook_of_its_is_asked():
    script = f"""
import sys
from lmcache.plugins.manager import PluginManager
manager = PluginManager()
def loaded():
    return [name for name in {list(BUILT_IN)} if name in sys.modules]
assert loaded() == [], loaded()
manager.find_policy("LRU")
assert loaded() == {[name for name in BUILT_IN if "eviction" in name]}, loaded()
assert len(manager.describe()) == len(loaded())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_dotted_module_is_a_plugin(shelf):
    shelf.policy("shop.policies.mru", "mru")
    manager = PluginManager(["shop.policies.mru"])
    assert manager.find_policy("MRU").__module__ == "shop.policies.mru"
    assert described(manager)["shop.policies.mru"].origin == "--plugin"


def test_a_dotted_module_in_the_current_folder_is_a_plugin_and_so_is_what_it_imports(shelf, tmp_path, monkeypatch):
    shelf.policy("here_package.base_policy", "here")
    (tmp_path / "here_package" / "my_policy.py").write_text("from here_package.base_policy import *\n")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert PluginManager(["here_package.my_policy"]).find_policy("here").__module__ == "here_package.base_policy"
    assert sys.path[-1] == str(tmp_path)


def test_the_current_folder_hides_nothing_that_is_installed_and_is_left_alone_when_it_has_nothing(
    shelf, tmp_path, monkeypatch
):
    shelf.policy("lmcache", "not this")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert PluginManager(["lmcache.plugins.eviction.lru"]).policies() == PluginManager().policies()
    assert refusal(["nobody.there"]).startswith("--plugin nobody.there is no importable module")
    assert sys.path == before


def test_a_python_file_is_a_plugin_wherever_it_lies(shelf, tmp_path):
    path = shelf.policy("folder.queue", "from-file")  # named like a module of the standard library
    manager = PluginManager([str(path)])
    assert manager.find_policy("from-file").__module__ == str(path)
    assert PluginManager([str(path)]).find_policy("from-file") is manager.find_policy("from-file")
    assert hasattr(importlib.import_module("queue"), "Queue")


def test_an_installed_distribution_is_loaded_by_its_entry_point(shelf):
    shelf.policy("fridge_plugin", "fridge")
    shelf.distribution("lmcache-fridge", cool="fridge_plugin")
    manager = PluginManager()
    assert manager.find_policy("fridge").__module__ == "fridge_plugin"
    assert described(manager)["cool"].distribution == "lmcache-fridge 1.0"
    assert described(manager)["cool"].origin == "entry point"


@pytest.mark.parametrize("name", ["lmcache-fridge", "LMCache_Fridge", "cool", "fridge_plugin"])
def test_naming_what_is_loaded_anyway_changes_nothing(shelf, name):
    shelf.policy("fridge_plugin", "fridge")
    shelf.distribution("lmcache-fridge", cool="fridge_plugin")
    assert [each.name for each in PluginManager([name]).describe()] == [*BUILT_IN, "cool"]


def test_an_entry_point_is_imported_only_when_a_manager_is_built(shelf):
    shelf.policy("fridge_plugin", "fridge")
    shelf.distribution("lmcache-fridge", cool="fridge_plugin")
    assert "fridge_plugin" not in sys.modules
    PluginManager()
    assert "fridge_plugin" in sys.modules


def test_a_class_or_an_instance_can_be_an_entry_point(shelf):
    shelf.module(
        "objects",
        """
        class Plugin:
            @hookimpl
            def lmcache_server_started(self, address):
                self.address = address

        plugin = Plugin()
        """,
    )
    shelf.distribution("lmcache-objects", object="objects:plugin")
    PluginManager().server_started("127.0.0.1:5555")
    assert sys.modules["objects"].plugin.address == "127.0.0.1:5555"


def test_the_same_plugin_twice_is_one_plugin(shelf):
    path = str(shelf.policy("twice", "twice"))
    assert len(PluginManager([path, path]).describe()) == len(BUILT_IN) + 1


# --------------------------------------------------------------------------------------------------------- leaving out


def test_a_built_in_plugin_can_be_left_out_so_that_another_takes_its_name(shelf):
    shelf.policy("own_lru", "lru")
    manager = PluginManager(["own_lru", "no:lmcache.plugins.eviction.lru"])
    assert manager.find_policy("LRU").__module__ == "own_lru"
    assert (manager.policies().count("lru"), manager.policies().count("LRU")) == (1, 0)


def test_an_entry_point_can_be_left_out_and_is_not_imported_then(shelf):
    shelf.module("broken_plugin", "raise RuntimeError('no licence')")
    shelf.distribution("lmcache-broken", broken="broken_plugin")
    assert "broken" not in described(PluginManager(["no:broken"]))


def test_leaving_out_what_does_not_exist_lists_what_does():
    assert refusal(["no:lmcache.plugins.eviction.lruu"]) == (
        "--plugin no:lmcache.plugins.eviction.lruu leaves out a plugin that does not exist; did you mean "
        f"'lmcache.plugins.eviction.lru'? What can be left out: of lmcache itself {', '.join(BUILT_IN)}; of installed "
        "distributions nothing, for none announces a plugin"
    )


def test_what_can_be_left_out_counts_the_plugins_of_installed_distributions(shelf):
    shelf.policy("fridge_plugin", "fridge")
    shelf.distribution("lmcache-fridge", cool="fridge_plugin")
    assert refusal(["no:warm"]).endswith("; of installed distributions cool")


def test_without_any_policy_left_nobody_is_told_to_use_a_known_one():
    with pytest.raises(PluginError) as unknown:
        PluginManager([f"no:{name}" for name in BUILT_IN]).find_policy("LRU")
    assert str(unknown.value) == (
        "no plugin offers the eviction policy 'LRU', nor any other; add a plugin that does with --plugin, or leave out "
        "fewer with --plugin no:NAME"
    )


def test_a_plugin_cannot_be_named_and_left_out(shelf):
    shelf.policy("fridge_plugin", "fridge")
    shelf.distribution("lmcache-fridge", cool="fridge_plugin")
    assert refusal(["lmcache-fridge", "no:cool"]) == "--plugin has lmcache-fridge and no:cool; drop one of the two"


# --------------------------------------------------------------------------------------- what cannot be found or loaded


def test_an_unknown_name_says_what_a_name_may_be():
    assert refusal(["lmcache.plugins.eviction.lro"]) == (
        "--plugin lmcache.plugins.eviction.lro is no importable module, no installed distribution with lmcache plugins "
        "and no .py file; did you mean 'lmcache.plugins.eviction.lru'? install it, go to the folder that holds it, "
        "or give the path of a .py file"
    )
    assert refusal(["nobody.there"]).startswith("--plugin nobody.there is no importable module")


def test_a_missing_file_is_named(tmp_path):
    assert refusal([f"{tmp_path}/policy.py"]) == (
        f"--plugin {tmp_path}/policy.py: {tmp_path}/policy.py does not exist; give the path of a Python file"
    )


def test_a_distribution_without_entry_points_is_told_from_one_that_is_not_installed(shelf):
    shelf.distribution("lmcache-empty")
    assert refusal(["lmcache-empty"]) == (
        "--plugin lmcache-empty: the distribution is installed, but announces nothing in the entry-point group "
        "'lmcache'; name the module of the plugin instead, with dots"
    )


def test_a_plugin_that_lacks_a_package_names_it(shelf):
    shelf.module("needy", "import a_package_that_is_not_there")
    assert refusal(["needy"]) == (
        "plugin 'needy' (--plugin) cannot be imported: ModuleNotFoundError: No module named "
        "'a_package_that_is_not_there'; repair or reinstall it, or drop it from --plugin"
    )


def test_a_package_that_fails_above_the_plugin_is_reported_as_it_failed(shelf):
    shelf.module("outer.inner", "")
    (shelf.folder / "outer" / "__init__.py").write_text("import a_package_that_is_not_there")
    assert "'a_package_that_is_not_there'" in refusal(["outer.inner"])
    (shelf.folder / "outer" / "__init__.py").write_text("raise SystemExit('needs Linux 7')")
    assert refusal(["outer.inner"]).startswith(
        "plugin 'outer.inner' (--plugin) cannot be imported: SystemExit: needs Linux 7"
    )


def test_a_broken_entry_point_says_how_to_go_on_without_it(shelf):
    shelf.module("broken_plugin", "raise RuntimeError('no licence')")
    shelf.distribution("lmcache-broken", broken="broken_plugin")
    assert refusal([]) == (
        "plugin 'broken' (entry point of lmcache-broken 1.0) cannot be imported: RuntimeError: no licence; "
        "repair or reinstall it, or leave it out with --plugin no:broken"
    )


def test_a_file_that_fails_is_tried_anew_the_next_time(shelf):
    path = shelf.module("flaky", "raise RuntimeError('not yet')")
    assert "RuntimeError: not yet" in refusal([str(path)])
    shelf.policy("flaky", "ready")
    assert PluginManager([str(path)]).policies() == (*PluginManager().policies(), "ready")


def test_two_plugins_of_one_name_are_both_named(shelf):
    shelf.policy("one_plugin", "one")
    shelf.policy("other_plugin", "other")
    shelf.distribution("lmcache-one", fast="one_plugin")
    shelf.distribution("lmcache-other", fast="other_plugin")
    message = refusal([])
    assert "plugin 'fast' (entry point of lmcache-one 1.0)" in message
    assert "plugin 'fast' (entry point of lmcache-other 1.0)" in message
    assert message.endswith("have one name; uninstall the one that you do not want")


# ------------------------------------------------------------------------------------------------ what is wrong with it


def test_a_misspelt_hook_stops_the_start_and_suggests_the_nearest(shelf):
    shelf.module("typo", "@hookimpl\ndef lmcache_register_evictoin_policies():\n    return []")
    assert refusal(["typo"]) == (
        "plugin 'typo' (--plugin) implements lmcache_register_evictoin_policies, which is no hook; "
        "did you mean 'lmcache_register_eviction_policies'?"
    )


def test_a_hook_like_no_other_gets_the_list_of_hooks(shelf):
    shelf.module("typo", "@hookimpl(specname='zzz')\ndef anything():\n    return []")
    assert "zzz, which is no hook; the hooks are lmcache_register_eviction_policies, lmcache_" in refusal(["typo"])


def test_a_hook_of_another_version_may_be_marked_optional(shelf):
    shelf.module("newer", "@hookimpl(optionalhook=True)\ndef lmcache_of_the_future():\n    return []")
    assert described(PluginManager(["newer"]))["newer"].hooks == ()


def test_a_function_that_lacks_the_decorator_is_not_passed_over_in_silence(shelf):
    shelf.module("bare", "def lmcache_server_started(address):\n    pass")
    assert refusal(["bare"]) == (
        "plugin 'bare' (--plugin) has a function lmcache_server_started that is not marked as a hook; "
        "decorate it with lmcache.core.hookspecs.hookimpl, or give it a name that begins otherwise"
    )


def test_a_module_without_hooks_is_not_passed_over_in_silence(shelf):
    shelf.policy("package.policy", "x")
    (shelf.folder / "package" / "__init__.py").write_text("")
    assert refusal(["package"]) == (
        "plugin 'package' (--plugin) implements no hook; name the module that has the functions marked with hookimpl"
    )


def test_an_argument_that_a_hook_does_not_have_is_named(shelf):
    shelf.module("greedy", "@hookimpl\ndef lmcache_server_started(address, port):\n    pass")
    assert refusal(["greedy"]) == (
        "plugin 'greedy' (--plugin) wants port from lmcache_server_started; "
        "take some or all of the arguments that it has: lmcache_server_started(address)"
    )


def test_hooks_are_not_wrapped(shelf):
    shelf.module("wrap", "@hookimpl(wrapper=True)\ndef lmcache_server_stopping():\n    return (yield)")
    assert refusal(["wrap"]).startswith("plugin 'wrap' (--plugin) wraps lmcache_server_stopping; implement it plainly")


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("pass", "returned None from lmcache_register_eviction_policies; return a list of classes"),
        ("yield", "from lmcache_register_eviction_policies; return a list of classes"),
        ("return [int]", "offers <class 'int'> as eviction policy; offer a class that derives from EvictionPolicy"),
        ("return [Policy()]", "as eviction policy; offer a class that derives from EvictionPolicy"),
        ("return [NameLess]", "offers NameLess, whose name is None; set its class attribute 'name' to one word"),
        ("return [TwoWords]", "offers TwoWords, whose name is 'a b'; set its class attribute 'name' to one word"),
        ("return [Half]", "offers Half, which lacks remove, victims; implement what it lacks"),
        ("raise OSError('gone')", "failed in lmcache_register_eviction_policies: OSError: gone; repair it, or drop it"),
    ],
)
def test_what_is_offered_is_checked_at_start(shelf, body, finding):
    shelf.module(
        "offer",
        f"""
        from lmcache.core.policy import EvictionPolicy
        from lmcache.plugins.eviction.lru import LRU

        class Policy(LRU):
            name = "p"

        class NameLess(LRU):
            name = None

        class TwoWords(LRU):
            name = "a b"

        class Half(EvictionPolicy):
            name = "half"
            def insert(self, node): ...
            def touch(self, nodes): ...

        @hookimpl
        def lmcache_register_eviction_policies():
            {body}
        """,
    )
    message = refusal(["offer"])
    assert message.startswith("plugin 'offer' (--plugin) ")
    assert finding in message


# ----------------------------------------------------------------------------------------------------------- looking up


def test_an_unknown_policy_lists_the_known_ones(shelf):
    shelf.policy("mru_plugin", "mru")
    with pytest.raises(PluginError) as unknown:
        PluginManager(["mru_plugin"]).find_policy("mur")
    assert str(unknown.value) == (
        "no plugin offers the eviction policy 'mur'; known: ARC, FIFO, GDSF, LFU, LRU, S3-FIFO, SIEVE, SLRU, "
        "W-TinyLFU, mru, prefix-aware; did you mean 'mru'? "
        "use a known one, or add the plugin that offers it with --plugin"
    )


def test_a_policy_that_cannot_be_made_is_no_internal_error(shelf):
    path = shelf.policy("sized_plugin", "sized")
    path.write_text(path.read_text() + "Policy.__init__ = lambda self, size: None")
    with pytest.raises(PluginError) as refused:
        PluginManager(["sized_plugin"]).make_policy("SIZED")
    assert str(refused.value) == (
        "the eviction policy 'SIZED', sized_plugin.Policy, cannot be made: TypeError: <lambda>() missing 1 required "
        "positional argument: 'size'; choose another, or repair it: a policy is made without arguments"
    )
    assert type(PluginManager().make_policy("lru")) is LRU


def test_two_plugins_that_offer_one_policy_are_both_named(shelf):
    shelf.policy("own_lru", "lru")
    assert refusal(["own_lru"]) == (
        "plugin 'lmcache.plugins.eviction.lru' (built-in) and plugin 'own_lru' (--plugin) both offer the eviction "
        "policy 'lru'; leave the first out with --plugin no:lmcache.plugins.eviction.lru, or drop the second from "
        "--plugin"
    )


class Spec:
    """Some engine's KV spec."""


def test_the_plugin_loaded_last_that_knows_a_spec_classifies_it(shelf):
    for name, kind in (("first", "FULL"), ("second", "SCRATCH")):
        shelf.module(
            name,
            f"""
            from lmcache.geometry.groups import GroupKind

            @hookimpl
            def lmcache_classify_kv_spec(engine, spec):
                return GroupKind.{kind} if engine == {name!r} or engine == "both" else None
            """,
        )
    manager = PluginManager(["first", "second"])
    assert manager.classify_kv_spec("both", Spec()) is GroupKind.SCRATCH
    assert manager.classify_kv_spec("first", Spec()) is GroupKind.FULL
    assert manager.classify_kv_spec("neither", Spec()) is None


def test_ours_comes_before_everybody_elses_whenever_it_is_imported(shelf):
    shelf.module(
        "late",
        """
            from lmcache.plugins.eviction.lru import LRU
            class Late(LRU):
                name = "late"
            @hookimpl
            def lmcache_register_eviction_policies():
                return [Late]
        """,
    )
    assert PluginManager(["late"]).policies()[-1] == "late"


def test_a_classification_that_is_no_kind_is_refused(shelf):
    shelf.module("vague", "@hookimpl\ndef lmcache_classify_kv_spec(spec):\n    return 'full'")
    with pytest.raises(PluginError) as refused:
        PluginManager(["vague"]).classify_kv_spec("engine", Spec())
    assert str(refused.value) == (
        "plugin 'vague' (--plugin) classifies Spec of engine as 'full'; "
        "return a member of lmcache.geometry.groups.GroupKind, or None"
    )


# ------------------------------------------------------------------------------------------------------------ observers


def test_an_observer_that_raises_is_logged_by_name_and_the_others_are_told(shelf, caplog):
    shelf.module(
        "bad",
        """
        @hookimpl
        def lmcache_server_started(address):
            raise RuntimeError("cannot reach the pager")

        @hookimpl
        def lmcache_server_stopping():
            raise SystemExit(3)
        """,
    )
    shelf.module(
        "good",
        """
        told = []

        @hookimpl
        def lmcache_server_started(address):
            told.append(address)

        @hookimpl
        def lmcache_server_stopping():
            told.append("stopping")
        """,
    )
    manager = PluginManager(["good", "bad"])
    with caplog.at_level(logging.ERROR):
        manager.server_started("127.0.0.1:5555")
        manager.server_stopping()
    assert sys.modules["good"].told == ["127.0.0.1:5555", "stopping"]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin 'bad' (--plugin) raised in lmcache_server_started; the server goes on",
        "plugin 'bad' (--plugin) raised in lmcache_server_stopping; the server goes on",
    ]
    assert "cannot reach the pager" in caplog.text


# ----------------------------------------------------------------------------------------------------------------- cost


def test_building_a_manager_imports_nothing_that_only_tests_or_servers_need():
    heavy = ("pytest", "hypothesis", "zmq")
    script = (
        "import sys; from lmcache.plugins.manager import PluginManager; PluginManager(); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
