"""The optimizer templates of one load: their groups are planned together, set together, reported.

With the reader of another package the groups of a checkpoint cannot be read beforehand. Then what
arrives is only compared, and refused where `set_optimizer_state_dict` would mix groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.errors import OptimizerStateError, PlanError
from dcp_reshard.hyper_values import same_value
from dcp_reshard.nearest_names import shorten
from dcp_reshard.optimizer_templates import Template, find_templates
from dcp_reshard.param_names import canonical_name
from dcp_reshard.plan import PlanOptions
from dcp_reshard.report import HyperParameter
from dcp_reshard.template_groups import TemplatePlan, plan_template
from dcp_reshard.values import Taken

__all__ = ["TemplateLoad"]


@dataclass(slots=True, eq=False)
class TemplateLoad:
    """The templates in a state dict, and what their groups get."""

    templates: list[Template]
    """The templates."""

    plans: list[TemplatePlan] = field(default_factory=list)
    """What is set, of those whose groups could be read."""

    unknown: list[str] = field(default_factory=list)
    """Keys of groups that the checkpoint does not know."""

    _compared: list[Template] = field(default_factory=list)
    _arrived: dict[tuple[int, int, KeyPath], tuple[str, object]] = field(default_factory=dict)
    """In the flattened form: key and value that came first, by template, group and name."""

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], options: PlanOptions) -> TemplateLoad:
        """Find the templates.

        Raises:
            PlanError: `options.groups` names groups that there are not.
        """
        templates = find_templates(state_dict)
        known = {key for t in templates for group in t.groups for key in group.keys}
        unknown = sorted((options.groups or {}).keys() - known)
        if unknown:
            raise PlanError(
                f"`groups` names {shorten(unknown)}, but the state dict has parameter groups "
                f"{shorten(sorted(known)) or 'nowhere'}"
            )
        return cls(templates)

    def plan(
        self,
        paths: Mapping[str, KeyPath],
        keys: Mapping[str, str],
        catalog: Catalog,
        *,
        options: PlanOptions,
        read: Callable[[dict[str, Any]], None],
    ) -> list[str]:
        """Plan what groups get; arguments and errors are those of `plan_template`.

        Returns:
            Keys of the state dict that need not be loaded any more.
        """
        taken: list[str] = []
        for template in self.templates:
            plan = plan_template(template, paths, keys, catalog, options=options, read=read)
            if plan is None:
                continue
            self.plans.append(plan)
            own = [fqn for fqn, path in paths.items() if template.has_group_value(path)]
            self.unknown += [fqn for fqn in own if template.group_at(paths[fqn]) in plan.unknown]
            taken += own
        return taken

    def compare(
        self,
        paths: Mapping[str, KeyPath],
        keys: Mapping[str, str],
        catalog: Catalog,
        values: Mapping[str, Any],
    ) -> None:
        """Leave groups to the load, and compare what arrives; what does not has its own value."""
        self._compared = self.templates
        for fqn, path in paths.items():
            if keys[fqn] not in catalog:
                self.check(path, values[fqn])

    @property
    def compares(self) -> bool:
        """Whether `check` compares anything."""
        return bool(self._compared)

    def check(self, path: KeyPath, value: object) -> None:
        """Compare a value that has arrived, if it is one of a group that was not planned.

        Raises:
            OptimizerStateError: No group of a nested template has these parameters, and no others;
                or parameters of a flattened one that may be one group get different values.
        """
        for number, template in enumerate(self._compared):
            group = template.group_at(path)
            if group is None:
                continue
            key = ".".join(map(str, path))
            if not template.flattened:
                if path[-1] == "params" and isinstance(value, list):
                    _check_list(template, key, value)
                continue
            depth = len(template.path)
            name = (str(path[depth]).rpartition(".")[2], *path[depth + 1 :])
            # Parameters of one group have one tensor, which the next of them will overwrite.
            own = value.clone() if isinstance(value, torch.Tensor) else value
            first = self._arrived.setdefault((number, group, name), (key, own))
            if not same_value(first[1], value):
                raise OptimizerStateError(
                    f"`{first[0]}` is {first[1]!r} and `{key}` {value!r} in the checkpoint, but "
                    f"these parameters have equal hyper-parameters in the state dict, and may be "
                    f"one group; give the optimizer the groups that it had, with a `name` in each, "
                    f"or use `ReshardStorageReader`, with which `groups` can say what is meant"
                )

    def read(self) -> list[str]:
        """Keys of the checkpoint that values of groups come from."""
        return [key for plan in self.plans for key in plan.read]

    def changes(self) -> tuple[HyperParameter, ...]:
        """What there is to report."""
        return tuple(change for plan in self.plans for change in plan.changes())

    def convert(self, *, lossy: bool) -> Iterator[tuple[dict[str, Any], str, Taken]]:
        """Hyper-parameters to set; see `TemplatePlan.convert`."""
        for plan in self.plans:
            yield from plan.convert(lossy=lossy)


def _check_list(template: Template, key: str, stored: list[object]) -> None:
    mine = [{canonical_name(name) for name in group.params} for group in template.groups]
    if {canonical_name(str(name)) for name in stored} not in mine:
        raise OptimizerStateError(
            f"`{key}`: the checkpoint has a group of {shorten(map(str, stored))}, the state dict "
            f"has groups of {[list(group.params) for group in template.groups]!r:.500}; give the "
            f"optimizer the groups that it had, or use `ReshardStorageReader`, with which the "
            f"planner can match groups"
        )
