/** The tokens of one turn, coloured by their probability or their advantage. */
import { ActionIcon, SegmentedControl } from "@mantine/core";
import { memo, useEffect, useMemo, useRef, useState } from "react";
import type { AdvantagesOf, Token, Tokens } from "../api";
import { useAnswer } from "../data";
import { number, percent, plural, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { Choice } from "../lists";
import { useQuery } from "../router";
import { Blank, Facts, Mark, Notice, Shown } from "../ui";

export function TokenView({ base }: { base: string }) {
  const [query] = useQuery();
  const turn = Math.max(0, Number(query.get("turn") ?? 0) || 0);
  const asked = useAnswer<Tokens>(`${base}/tokens?turn=${turn}`);
  return <Shown asked={asked}>{(data) => <Turn key={data.turn} data={data} />}</Shown>;
}

type By = "probability" | "advantage";
const WINDOW = 1500;

interface Shade {
  name: string;
  label: string;
}
const PROBABILITY: Shade[] = [
  { name: "b0", label: "90% and more" },
  { name: "b1", label: "50 – 90%" },
  { name: "b2", label: "10 – 50%" },
  { name: "b3", label: "1 – 10%" },
  { name: "b4", label: "below 1%" },
];
const ADVANTAGE: Shade[] = [
  { name: "up2", label: "far above 0" },
  { name: "up1", label: "above 0" },
  { name: "down1", label: "below 0" },
  { name: "down2", label: "far below 0" },
];

function shade(token: Token, by: By, largest: number): string {
  if (by === "probability") {
    if (token.logprob === null) return "";
    const p = Math.exp(token.logprob);
    return p >= 0.9 ? "b0" : p >= 0.5 ? "b1" : p >= 0.1 ? "b2" : p >= 0.01 ? "b3" : "b4";
  }
  if (!token.advantage) return "";
  const far = Math.abs(token.advantage) > largest / 2;
  return token.advantage > 0 ? (far ? "up2" : "up1") : far ? "down2" : "down1";
}

function Turn({ data }: { data: Tokens }) {
  const [query, change] = useQuery();
  const by: By = query.get("by") === "advantage" ? "advantage" : "probability";
  const go = (turn: number) => {
    if (turn < 0 || turn >= data.turns) return false;
    change({ turn: String(turn) });
    return true;
  };
  useKeys({ j: () => go(data.turn + 1), k: () => go(data.turn - 1) });
  const tokens = useMemo(() => [...data.context, ...data.sampled], [data]);
  const start = data.context.length;
  // Where the sampled tokens begin, with some of what came before.
  const [from, setFrom] = useState(() => Math.max(0, Math.min(start - 400, tokens.length - WINDOW)));
  const [here, setHere] = useState<number | null>(null);
  const largest = useMemo(() => Math.max(1e-9, ...data.sampled.map((token) => Math.abs(token.advantage ?? 0))), [data]);
  const trained = data.sampled.filter((token) => token.trained).length;
  const probabilities = data.sampled.filter((token) => token.logprob !== null);
  const mean = probabilities.reduce((sum, token) => sum + (token.logprob ?? 0), 0) / Math.max(1, probabilities.length);
  const legend = by === "probability" ? PROBABILITY : ADVANTAGE;
  const to = Math.min(tokens.length, from + WINDOW);
  return (
    <>
      <div className="filters">
        <ActionIcon variant="default" size="md" aria-label="Previous turn (k)" disabled={data.turn === 0} onClick={() => go(data.turn - 1)}>
          <Icon name="left" />
        </ActionIcon>
        <ActionIcon variant="default" size="md" aria-label="Next turn (j)" disabled={data.turn >= data.turns - 1} onClick={() => go(data.turn + 1)}>
          <Icon name="right" />
        </ActionIcon>
        {data.turns <= 500 ? (
          <Choice
            label="Turn"
            value={String(data.turn)}
            onChange={(turn) => go(Number(turn))}
            options={Array.from({ length: data.turns }, (_, n) => [String(n), `Turn ${n} of ${data.turns}`])}
          />
        ) : (
          <span>
            Turn {whole(data.turn)} of {whole(data.turns)}
          </span>
        )}
        <SegmentedControl size="xs" aria-label="Colour by" value={by} onChange={(value) => change({ by: value === "advantage" ? value : "" })} data={[
          { value: "probability", label: "Probability" },
          { value: "advantage", label: "Advantage" },
        ]} />
        {data.role && <Mark kind={data.role === "main" ? "" : "info"}>{data.role}</Mark>}
        {data.policy_version !== null && <Mark>policy version {data.policy_version}</Mark>}
        {data.flaw ? (
          <Mark kind="warn" icon="warn">
            not trained on: {data.flaw}
          </Mark>
        ) : (
          <Mark kind="kept" icon="check">
            trained on {plural(trained, "token")}
          </Mark>
        )}
      </div>
      {data.note && <Notice>{data.note}</Notice>}
      {by === "advantage" && data.sampled.length > 0 && <Origin of={data.advantages} />}
      <Facts
        rows={[
          ["Prompt before", plural(data.before, "id")],
          ["New prompt tokens", whole(data.context.length)],
          ["Sampled tokens", whole(data.sampled.length)],
          ["Mean log-probability", probabilities.length ? `${number(mean)} nats` : "–"],
          ["Reward of the turn", number(data.reward)],
        ]}
      />
      <div className="columns">
        <div>
          <ul className="legend" style={{ marginBottom: 10 }} aria-label="Colours">
            {legend.map(({ name, label }) => (
              <li key={name}>
                <span className="tokens" style={{ lineHeight: 1 }} aria-hidden="true">
                  <span className={name}>&nbsp;ab&nbsp;</span>
                </span>
                {label}
              </li>
            ))}
            <li>
              <span className="tokens" aria-hidden="true">
                <span className="not">ab</span>
              </span>
              prompt
            </li>
            <li>
              <span className="tokens" aria-hidden="true">
                <span className="masked">ab</span>
              </span>
              sampled, not trained on
            </li>
          </ul>
          {tokens.length === 0 ? (
            <Blank small title="No tokens">
              <p>No token ids are stored for this turn.</p>
            </Blank>
          ) : (
            <div className="card">
              {from > 0 && (
                <button className="more" onClick={() => setFrom(Math.max(0, from - WINDOW))}>
                  Show the {whole(Math.min(from, WINDOW))} tokens before
                </button>
              )}
              <Run tokens={tokens} from={from} to={to} start={start} by={by} largest={largest} here={here} setHere={setHere} />
              {to < tokens.length && (
                <button className="more" onClick={() => setFrom(to)}>
                  Show the next {whole(Math.min(WINDOW, tokens.length - to))} of {whole(tokens.length - to)} tokens
                </button>
              )}
            </div>
          )}
        </div>
        <div className="aside">
          <About token={here === null ? undefined : tokens[here]} at={here} sampled={here !== null && here >= start} />
        </div>
      </div>
    </>
  );
}

/** Where the advantages are from. */
function Origin({ of }: { of: AdvantagesOf | null }) {
  if (!of) return <Notice>No advantage is stored for this turn. It is known once the group of the episode is complete.</Notice>;
  if (of.step === null)
    return (
      <Notice>
        <b>Computed here,</b> by GRPO from the rewards of the group: the training stored no advantages for this episode.
      </Notice>
    );
  const [least, most] = of.spread ?? [];
  return (
    <Notice>
      <b>As step {whole(of.step)} of the training used it.</b>{" "}
      {least === undefined
        ? "This turn was not trained on."
        : least === most
          ? "All tokens of the turn have it."
          : `The tokens of the turn have from ${number(least)} to ${number(most)}; their mean is shown.`}
    </Notice>
  );
}

function About({ token, at, sampled }: { token: Token | undefined; at: number | null; sampled: boolean }) {
  return (
    <div className="card" aria-live="polite">
      <div className="title">
        <h2>Token</h2>
        {at !== null && <span className="soft">position {whole(at)}</span>}
      </div>
      {token ? (
        <>
          <div className="block" style={{ marginBottom: 10 }}>
            {token.text === null ? "(text unknown)" : JSON.stringify(token.text)}
          </div>
          <Facts
            rows={[
              ["Id", String(token.id)],
              ["Probability", token.logprob === null ? "–" : percent(Math.exp(token.logprob), 2)],
              ["Log-probability", token.logprob === null ? "–" : `${number(token.logprob)} nats`],
              ["Advantage", number(token.advantage)],
              ["Trained on", token.trained ? "yes" : "no"],
              ["Part", sampled ? "sampled" : "prompt"],
            ]}
          />
        </>
      ) : (
        <p className="soft">Point at a token, or move with the arrow keys.</p>
      )}
    </div>
  );
}

interface RunProps {
  tokens: Token[];
  from: number;
  to: number;
  start: number;
  by: By;
  largest: number;
  here: number | null;
  setHere: (at: number) => void;
}

function Run(props: RunProps) {
  const { here, setHere, from, to } = props;
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const old = box.current?.querySelector(".here");
    old?.classList.remove("here");
    if (here !== null) box.current?.querySelector(`[data-i="${here}"]`)?.classList.add("here");
  }, [here, from, to, props.by]);
  return (
    <div
      ref={box}
      className="tokens"
      role="application"
      aria-roledescription="tokens"
      tabIndex={0}
      aria-label={`Tokens ${from} to ${to - 1}. The arrow keys move from token to token.`}
      onMouseOver={(event) => {
        const found = (event.target as HTMLElement).dataset.i;
        if (found) setHere(Number(found));
      }}
      onKeyDown={(event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
        if (!by) return;
        event.preventDefault();
        const next = Math.min(to - 1, Math.max(from, (here ?? Math.max(from, props.start - 1)) + by));
        setHere(next);
        box.current?.querySelector(`[data-i="${next}"]`)?.scrollIntoView({ block: "nearest" });
      }}
    >
      <Spans tokens={props.tokens} from={from} to={to} start={props.start} by={props.by} largest={props.largest} />
    </div>
  );
}

const Spans = memo(function Spans({ tokens, from, to, start, by, largest }: Omit<RunProps, "here" | "setHere">) {
  return tokens.slice(from, to).map((token, n) => {
    const at = from + n;
    const sampled = at >= start;
    const kind = sampled ? `${shade(token, by, largest)}${token.trained ? "" : " masked"}` : "not";
    return (
      <span key={at} data-i={at} className={kind}>
        {token.text === null ? ` ${token.id} ` : token.text.replaceAll("\n", "↵\n")}
      </span>
    );
  });
});
