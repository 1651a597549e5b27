/** The screenshots that an agent saw, one after another. */
import { ActionIcon, Button } from "@mantine/core";
import { useReducedMotion } from "@mantine/hooks";
import { useEffect, useState } from "react";
import type { Page, Picture, Step } from "../api";
import { useAnswer } from "../data";
import { plural, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { useQuery } from "../router";
import { Long, Shot } from "../ui";

export function Replay({ base, pictures }: { base: string; pictures: Picture[] }) {
  const [query, change] = useQuery();
  const at = Math.min(pictures.length - 1, Math.max(0, Number(query.get("picture") ?? 0) || 0));
  const [playing, play] = useState(false);
  const still = useReducedMotion();
  const picture = pictures[at];
  const go = (next: number) => change({ picture: String(Math.min(pictures.length - 1, Math.max(0, next))) });
  useKeys({ "[": () => go(at - 1), "]": () => go(at + 1), j: () => go(at + 1), k: () => go(at - 1) });
  useEffect(() => {
    if (!playing) return;
    if (at >= pictures.length - 1) return play(false);
    const timer = setTimeout(() => change({ picture: String(at + 1) }), 700);
    return () => clearTimeout(timer);
  }, [playing, at, pictures.length, change]);
  // The next picture is there when it is shown.
  useEffect(() => {
    const next = pictures[at + 1];
    if (next?.src.startsWith("/api/")) new Image().src = next.src;
  }, [at, pictures]);
  const steps = useAnswer<Page<Step>>(picture ? `${base}/turns?offset=${picture.step}&limit=1` : null);
  const step = steps.data?.items[0];
  if (!picture) return null;
  return (
    <div className="columns">
      <figure>
        <Shot key={picture.src} className="screen" src={picture.src} alt={`Screenshot ${at + 1} of ${pictures.length}, at step ${picture.step}`} />
        <div className="filters" style={{ marginTop: 10 }}>
          <ActionIcon variant="default" size="lg" aria-label="Previous screenshot" disabled={at === 0} onClick={() => go(at - 1)}>
            <Icon name="left" />
          </ActionIcon>
          {!still && (
            <ActionIcon
              variant="default"
              size="lg"
              aria-label={playing ? "Pause" : "Play"}
              onClick={() => {
                if (!playing && at >= pictures.length - 1) go(0);
                play(!playing);
              }}
            >
              <Icon name={playing ? "pause" : "play"} />
            </ActionIcon>
          )}
          <ActionIcon variant="default" size="lg" aria-label="Next screenshot" disabled={at >= pictures.length - 1} onClick={() => go(at + 1)}>
            <Icon name="right" />
          </ActionIcon>
          <input
            type="range"
            min={0}
            max={pictures.length - 1}
            value={at}
            aria-label="Screenshot"
            aria-valuetext={`${at + 1} of ${pictures.length}`}
            style={{ flex: 1, accentColor: "var(--accent)" }}
            onChange={(event) => go(Number(event.currentTarget.value))}
          />
          <span className="soft">
            {whole(at + 1)} of {plural(pictures.length, "screenshot")}
          </span>
        </div>
      </figure>
      <div className="aside">
        <div className="card">
          <div className="title">
            <h2>Step {picture.step}</h2>
            <Button size="compact-xs" variant="default" onClick={() => change({ tab: "", step: String(picture.step) }, { push: true })}>
              Open in the timeline
            </Button>
          </div>
          {step ? (
            <div style={{ display: "grid", gap: 8 }}>
              {step.text && <Long text={step.text} cap={500} lines={8} />}
              {step.calls.map((call, n) => (
                <div key={n}>
                  <code>
                    <b>{call.name}</b>
                  </code>
                  <Long className="block" text={call.arguments} cap={500} lines={8} />
                </div>
              ))}
            </div>
          ) : (
            <div className="ghost" style={{ width: "70%" }} />
          )}
        </div>
      </div>
    </div>
  );
}
