/** Curves, drawn by uPlot: a legend that hides and shows, values under the cursor, interval bands, and a table of them. */
import { useComputedColorScheme } from "@mantine/core";
import { memo, useEffect, useMemo, useRef, useState } from "react";
import uPlot from "uplot";
import { number, whole } from "./format";
import { visible } from "./visible";

export interface Line {
  name: string;
  x: number[];
  y: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
  /** Number of the colour, and of the dashes: lines are told apart without colour too. */
  colour?: number;
  dash?: number;
}

const DASHES: (number[] | undefined)[] = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]];

interface Props {
  title: string;
  lines: Line[];
  /** Name of the horizontal axis. */
  across?: string;
  from?: number;
  to?: number;
  height?: number;
  /** Charts with the same key share their cursor. */
  sync?: string;
  bars?: boolean;
  onPick?: (x: number) => void;
}

export const Chart = memo(function Chart(props: Props) {
  const { title, lines, across = "step", height = 190 } = props;
  const scheme = useComputedColorScheme("light");
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [off, setOff] = useState<ReadonlySet<string>>(new Set());
  const [at, setAt] = useState<number | null>(null);
  const [table, setTable] = useState(false);
  const pick = useRef(props.onPick);
  pick.current = props.onPick;
  const xs = useMemo(() => [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b), [lines]);
  const place = xs.every(Number.isInteger) ? whole : number;
  const columns = useMemo(() => lines.map((line) => column(xs, line)), [xs, lines]);

  useEffect(() => {
    const box = holder.current;
    if (!box || !xs.length) return;
    const style = getComputedStyle(box);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const data: (number | null)[][] = [xs];
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    lines.forEach((line, n) => {
      const stroke = colour(`--c${(line.colour ?? n) % 7}`);
      const show = !off.has(line.name);
      const { y, low, high } = columns[n] ?? { y: [], low: null, high: null };
      if (low && high) {
        bands.push({ series: [series.length, series.length + 1], fill: stroke + "2b" });
        data.push(high, low);
        series.push({ show, points: { show: false } }, { show, points: { show: false } });
      }
      data.push(y);
      const few = y.filter((value) => value !== null).length <= 40;
      series.push({
        show,
        stroke,
        width: 1.75,
        dash: DASHES[(line.dash ?? 0) % DASHES.length],
        points: { show: few && !props.bars, size: 5, fill: stroke },
        spanGaps: true,
        ...(props.bars ? { paths: uPlot.paths.bars?.({ size: [0.7, 12], align: 0 }), fill: stroke } : {}),
      });
    });
    const ink = { stroke: colour("--soft"), font: "11px system-ui", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const options: uPlot.Options = {
      width: Math.max(160, box.clientWidth),
      height,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => (xs.length === 1 ? [low - 1, high + 1] : props.bars ? [low - 0.6, high + 0.6] : [low, high]) },
        y: { range: (_, low, high) => limits(low, high, props.from, props.to) },
      },
      axes: [
        { ...ink, size: 26, gap: 4, values: (_, ticks) => ticks.map((tick) => (place === whole && !Number.isInteger(tick) ? "" : place(tick))) },
        { ...ink, size: 52, gap: 4, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      series,
      bands,
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: true },
        ...(props.sync ? { sync: { key: props.sync } } : {}),
      },
      hooks: {
        setCursor: [(u) => setAt(u.cursor.idx ?? null)],
      },
    };
    const made = new uPlot(options, data as uPlot.AlignedData, box);
    plot.current = made;
    const click = () => {
      const index = made.cursor.idx;
      if (index != null && made.select.width < 2) pick.current?.(xs[index] ?? 0);
    };
    made.over.addEventListener("click", click);
    const watch = new ResizeObserver(() => {
      const width = Math.max(160, box.clientWidth);
      if (width !== made.width) made.setSize({ width, height });
    });
    watch.observe(box);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [xs, place, lines, columns, off, scheme, height, props.from, props.to, props.sync, props.bars]);

  const index = at ?? xs.length - 1;
  const latest = lines
    .map((line) => `${visible(line.name)} ${number(lastValue(line.y))}`)
    .slice(0, 8)
    .join(", ");
  return (
    <figure className="card chart">
      <div className="title">
        <h3>{title}</h3>
        <button className="more" aria-pressed={table} onClick={() => setTable(!table)}>
          {table ? "Show the curve" : "Show as a table"}
        </button>
      </div>
      {xs.length === 0 ? (
        <p className="soft">Nothing has been measured yet.</p>
      ) : table ? (
        <Values xs={xs} place={place} lines={lines} columns={columns} across={across} title={title} />
      ) : (
        <>
          <div
            ref={holder}
            role="img"
            aria-label={`${title}: ${xs.length} points, ${across} ${number(xs[0])} to ${number(xs[xs.length - 1])}. Last: ${latest}.`}
            style={{ height, touchAction: "pan-y" }}
          />
          <ul className="legend">
            <li className="soft">
              {across} <output style={{ marginLeft: 4 }}>{place(xs[index])}</output>
            </li>
            {lines.map((line, n) => {
              const own = columns[n];
              const [low, high] = [own?.low?.[index], own?.high?.[index]];
              return (
                <li key={n}>
                  <button
                    aria-pressed={!off.has(line.name)}
                    title={off.has(line.name) ? "Show this line" : "Hide this line"}
                    onClick={() =>
                      setOff((old) => {
                        const next = new Set(old);
                        if (!next.delete(line.name)) next.add(line.name);
                        return next;
                      })
                    }
                  >
                    <Key colour={line.colour ?? n} dash={line.dash ?? 0} />
                    {line.name} <output>{number(nearest(own?.y ?? [], index))}</output>
                    {low != null && high != null && (
                      <span className="soft">
                        {number(low)} – {number(high)}
                      </span>
                    )}
                  </button>
                </li>
              );
            })}
          </ul>
        </>
      )}
    </figure>
  );
});

export function Key({ colour, dash }: { colour: number; dash: number }) {
  return (
    <svg width="18" height="8" aria-hidden="true">
      <line x1="1" x2="17" y1="4" y2="4" stroke={`var(--c${colour % 7})`} strokeWidth="2.5" strokeDasharray={DASHES[dash % 4]?.join(" ")} />
    </svg>
  );
}

interface Column {
  y: (number | null)[];
  low: (number | null)[] | null;
  high: (number | null)[] | null;
}

function column(xs: number[], line: Line): Column {
  const place = new Map(line.x.map((x, at) => [x, at]));
  const of = (values: (number | null)[] | undefined) =>
    values
      ? xs.map((x) => {
          const at = place.get(x);
          const value = at === undefined ? null : values[at];
          return value != null && Number.isFinite(value) ? value : null;
        })
      : null;
  return { y: of(line.y) ?? [], low: of(line.low), high: of(line.high) };
}

function limits(low: number | null, high: number | null, from?: number, to?: number): [number, number] {
  let [a, b] = [low ?? 0, high ?? 1];
  if (a === b) [a, b] = a === 0 ? [-0.5, 0.5] : [a - Math.abs(a) * 0.1, b + Math.abs(b) * 0.1];
  const space = (b - a) * 0.06;
  return [from ?? a - space, to ?? b + space];
}

const lastValue = (values: (number | null)[]) => values.findLast((value) => value != null);

/** The value at an index, or the newest before it: metrics are measured at different steps. */
function nearest(values: (number | null)[], index: number): number | null {
  for (let at = index; at >= 0; at--) if (values[at] != null) return values[at] ?? null;
  return null;
}

function Values({ xs, place, lines, columns, across, title }: { xs: number[]; place: (x: number) => string; lines: Line[]; columns: Column[]; across: string; title: string }) {
  const most = 200;
  const step = Math.max(1, Math.ceil(xs.length / most));
  return (
    <>
      <div className="scroll" role="group" aria-label={`${title}, as a table`} tabIndex={0} style={{ maxHeight: 240, overflow: "auto" }}>
        <table className="table">
          <thead>
            <tr>
              <th scope="col" className="num">
                {across}
              </th>
              {lines.map((line, n) => (
                <th key={n} scope="col" className="num">
                  {line.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {xs.map(
              (x, at) =>
                at % step === 0 && (
                  <tr key={x}>
                    <th scope="row" className="num">
                      {place(x)}
                    </th>
                    {columns.map((own, n) => (
                      <td key={n} className="num">
                        {number(own.y[at])}
                      </td>
                    ))}
                  </tr>
                ),
            )}
          </tbody>
        </table>
      </div>
      {step > 1 && <p className="soft">Every {whole(step)}th of {whole(xs.length)} points.</p>}
    </>
  );
}
