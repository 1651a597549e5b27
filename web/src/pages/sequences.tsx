/** The turns of an episode as a tree of prefixes, and the training sequences, which are its paths. */
import { useMemo, useState } from "react";
import type { Sequence, SequenceTree, TreeTurn } from "../api";
import { useAnswer } from "../data";
import { plural, whole } from "../format";
import { useQuery } from "../router";
import { Blank, Mark, Notice, Section, Shown, Table } from "../ui";

export function Sequences({ base }: { base: string }) {
  const asked = useAnswer<SequenceTree>(`${base}/sequences`);
  return <Shown asked={asked}>{(tree) => <Tree tree={tree} />}</Shown>;
}

/** Turns that follow one another without a branch. */
interface Segment {
  turns: TreeTurn[];
  depth: number;
}

/** The tree as segments, parents before children. */
export function segments(turns: TreeTurn[]): Segment[] {
  const children = new Map<number | null, TreeTurn[]>();
  const known = new Set(turns.map((turn) => turn.turn));
  for (const turn of turns) {
    const parent = turn.parent !== null && known.has(turn.parent) && turn.parent !== turn.turn ? turn.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), turn]);
  }
  const out: Segment[] = [];
  // A stack, since a conversation may be thousands of turns deep.
  const stack: [TreeTurn, number][] = (children.get(null) ?? []).map((turn): [TreeTurn, number] => [turn, 0]).reverse();
  while (stack.length) {
    const [first, depth] = stack.pop() as [TreeTurn, number];
    const segment: Segment = { turns: [first], depth };
    let next = children.get(first.turn) ?? [];
    while (next.length === 1 && next[0] && next[0].role === first.role) {
      segment.turns.push(next[0]);
      next = children.get(next[0].turn) ?? [];
    }
    out.push(segment);
    for (const child of [...next].reverse()) stack.push([child, depth + 1]);
  }
  return out;
}

const MOST = 300;

function Tree({ tree }: { tree: SequenceTree }) {
  const [, change] = useQuery();
  const [chosen, choose] = useState<number | null>(tree.sequences.length ? 0 : null);
  const parts = useMemo(() => segments(tree.turns), [tree]);
  const sequence: Sequence | undefined = chosen === null ? undefined : tree.sequences[chosen];
  const [on, trained] = useMemo(() => [new Set(sequence?.turns), new Set(sequence?.trained)], [sequence]);
  const anywhere = useMemo(() => new Set(tree.sequences.flatMap((each) => each.trained)), [tree]);
  if (!tree.turns.length)
    return (
      <Blank small title="No turns">
        <p>{tree.note || "Training sequences are made from the turns of an episode."}</p>
      </Blank>
    );
  return (
    <>
      {tree.note && <Notice>{tree.note}</Notice>}
      <Section title="Training sequences" aside={`${plural(tree.sequences.length, "sequence")}${tree.roles.length ? `, made for ${tree.roles.join(", ")}` : ""}. The episode counts once, whatever their number.`}>
        {tree.sequences.length === 0 ? (
          <p className="soft">No sequence can be trained on. The marks below say why.</p>
        ) : (
          <Table
            card
            label="Training sequences"
            cols={[
              {
                name: "",
                cell: (_, at) => <input type="radio" name="sequence" aria-label={`Show sequence ${at} in the tree`} checked={chosen === at} onChange={() => choose(at)} />,
              },
              { name: "sequence", num: true, cell: (_, at) => whole(at) },
              { name: "turns", grow: true, cell: (each) => ranges(each.turns) },
              { name: "trained turns", cell: (each) => ranges(each.trained) },
              { name: "ids", num: true, cell: (each) => whole(each.ids) },
              { name: "trained ids", num: true, cell: (each) => whole(each.trained_ids) },
            ]}
            rows={tree.sequences}
          />
        )}
      </Section>
      <Section title="Prefix tree" aside={`${plural(tree.turns.length, "turn")}. A branch begins where a prompt does not continue the one before.`}>
        <ul className="tree">
          {parts.slice(0, MOST).map((part, at) => {
            const first = part.turns[0] as TreeTurn;
            const last = part.turns[part.turns.length - 1] as TreeTurn;
            const sampled = part.turns.reduce((sum, turn) => sum + turn.sampled_ids, 0);
            const context = part.turns.reduce((sum, turn) => sum + turn.context_ids, 0);
            const flaws = [...new Set(part.turns.map((turn) => turn.flaw).filter(Boolean))];
            const marked = part.turns.some((turn) => on.has(turn.turn));
            const here = part.turns.filter((turn) => trained.has(turn.turn)).length;
            const some = part.turns.filter((turn) => anywhere.has(turn.turn)).length;
            const versions = [...new Set(part.turns.map((turn) => turn.policy_version).filter((v) => v !== null))];
            return (
              <li key={at}>
                {Array.from({ length: Math.min(part.depth, 12) }, (_, n) => (
                  <span key={n} className="rail" aria-hidden="true" />
                ))}
                <div className={marked ? "segment on" : "segment"}>
                  <button className="plainbutton" title="Show the tokens of the first of these turns" onClick={() => change({ tab: "tokens", turn: String(first.turn) }, { push: true })}>
                    <b>{first.turn === last.turn ? `Turn ${first.turn}` : `Turns ${first.turn} – ${last.turn}`}</b>
                  </button>
                  {part.depth > 12 && <span className="soft">depth {part.depth}</span>}
                  <Mark kind={first.role === "main" ? "" : "info"}>{first.role}</Mark>
                  <span className="soft">
                    {whole(context)} new prompt ids, {whole(sampled)} sampled
                  </span>
                  {versions.length > 0 && <span className="soft">version {versions.length > 2 ? `${versions[0]} – ${versions[versions.length - 1]}` : versions.join(", ")}</span>}
                  {some > 0 ? (
                    <Mark kind="kept" icon="check">
                      {some === part.turns.length ? "trained on" : `${whole(some)} of ${whole(part.turns.length)} trained on`}
                    </Mark>
                  ) : (
                    <Mark>not trained on</Mark>
                  )}
                  {marked && here > 0 && <Mark kind="info">in this sequence</Mark>}
                  {flaws.slice(0, 3).map((flaw) => (
                    <Mark key={flaw} kind="warn" icon="warn">
                      {flaw}
                    </Mark>
                  ))}
                </div>
              </li>
            );
          })}
        </ul>
        {parts.length > MOST && <p className="soft">and {whole(parts.length - MOST)} more branches</p>}
      </Section>
    </>
  );
}

/** 0, 1, 2, 5 as "0 – 2, 5". */
export function ranges(turns: number[]): string {
  const out: string[] = [];
  for (let at = 0; at < turns.length; at++) {
    const first = turns[at] as number;
    let last = first;
    while (turns[at + 1] === last + 1) last = turns[++at] as number;
    out.push(first === last ? `${first}` : `${first} – ${last}`);
    if (out.length > 12) return out.join(", ") + ", …";
  }
  return out.join(", ") || "none";
}
