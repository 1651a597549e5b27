/** The frame of all pages: navigation, theme, keys, and which page an address shows. */
import { ActionIcon, useMantineColorScheme } from "@mantine/core";
import { Component, useLayoutEffect, useRef, useState, type ReactNode } from "react";
import { Link, Route, Switch, useLocation, useSearch } from "wouter";
import { embedded, useConnection } from "./data";
import { Icon } from "./icons";
import { KeyHelp, useKeys } from "./keys";
import { AttackPage, AuditPage } from "./pages/audit";
import { BoardPage } from "./pages/board";
import { ComparePage } from "./pages/compare";
import { EpisodePage, PoolEpisodePage } from "./pages/episode";
import { ExperimentPage } from "./pages/experiment";
import { LivePage } from "./pages/live";
import { OnlinePage } from "./pages/online";
import { PoolPage } from "./pages/pool";
import { RunPage } from "./pages/run";
import { SearchPage } from "./pages/search";
import { SourcesPage } from "./pages/sources";
import { TrainingPage } from "./pages/training";
import { Blank, useTitle } from "./ui";

const THEMES = { auto: ["system", "dark"], dark: ["moon", "light"], light: ["sun", "auto"] } as const;
const NAMES = { auto: "as the system", dark: "dark", light: "light" } as const;

export function App() {
  const [help, setHelp] = useState(false);
  const [path, navigate] = useLocation();
  // Otherwise it puts a style element into the page for a moment, which the policy forbids.
  const { colorScheme, setColorScheme } = useMantineColorScheme({ keepTransitions: true });
  const [icon, next] = THEMES[colorScheme];
  const connection = useConnection();
  useKeys({
    "?": () => setHelp(true),
    t: () => setColorScheme(next),
    "/": () => (embedded ? false : navigate("/search")),
    Escape: () => {
      const up = parent(path);
      if (embedded || up === path) return false;
      navigate(up);
      return true;
    },
  });
  useScroll();
  return (
    <>
      <a className="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header className="bar">
        <Link href={embedded ? embedded.home : "/"} className="brand" aria-label="ClawGym, start">
          <svg width="20" height="20" viewBox="0 0 20 20" fill="none" stroke="currentColor" strokeWidth="2" strokeLinecap="round" aria-hidden="true">
            <path d="M4 16C3 11 4 6 7 3M9.5 16.5C8.5 11.500 9.500 7 12 4M15 17c-1-4.500-.2-8.500 2-11.500" />
          </svg>
          <span>ClawGym</span>
        </Link>
        <nav className="nav" aria-label="Main">
          {!embedded &&
            (
              [
                ["/", "Sources"],
                ["/live", "Live"],
                ["/search", "Search"],
              ] as const
            ).map(([to, name]) => (
              <Link key={to} href={to} aria-current={path === to ? "page" : undefined}>
                {name}
              </Link>
            ))}
        </nav>
        {connection === "lost" && (
          <span className="lost" role="status">
            <Icon name="warn" /> <span className="big-only">Connection lost, trying again</span>
          </span>
        )}
        <ActionIcon
          variant="subtle"
          color="gray"
          size="lg"
          aria-label={`Colours: ${NAMES[colorScheme]}. Switch to ${NAMES[next]}.`}
          title={`Colours: ${NAMES[colorScheme]}`}
          onClick={() => setColorScheme(next)}
        >
          <Icon name={icon} size={17} />
        </ActionIcon>
        <ActionIcon variant="subtle" color="gray" size="lg" aria-label="Keyboard shortcuts" title="Keyboard shortcuts" onClick={() => setHelp(true)}>
          <b aria-hidden="true">?</b>
        </ActionIcon>
      </header>
      <main id="main" tabIndex={-1} style={{ outline: "none" }}>
        <Guard key={path}>
          <Switch>
            <Route path="/" component={SourcesPage} />
            <Route path="/runs/:id" component={RunPage} />
            <Route path="/runs/:id/episodes/:name" component={EpisodePage} />
            <Route path="/compare" component={ComparePage} />
            <Route path="/training/:id" component={TrainingPage} />
            <Route path="/pools/:id" component={PoolPage} />
            <Route path="/pools/:id/episodes/:seq" component={PoolEpisodePage} />
            <Route path="/boards/:id" component={BoardPage} />
            <Route path="/audits/:id" component={AuditPage} />
            <Route path="/attacks/:id" component={AttackPage} />
            <Route path="/experiments/:id" component={ExperimentPage} />
            <Route path="/online/:id" component={OnlinePage} />
            <Route path="/live" component={LivePage} />
            <Route path="/search" component={SearchPage} />
            <Route>
              <Nowhere />
            </Route>
          </Switch>
        </Guard>
      </main>
      <KeyHelp open={help} close={() => setHelp(false)} />
    </>
  );
}

function parent(path: string): string {
  const found = /^(\/(?:runs|pools)\/[^/]+)\/episodes\//.exec(path);
  return found?.[1] ?? "/";
}

/** Whether the address changed by going back or forward. Set before the router hears of it: it listens later. */
let wentBack = false;
history.scrollRestoration = "manual";
addEventListener("popstate", () => (wentBack = true), true);

/** A new page begins at its top; one that is gone back to is where it was. */
function useScroll() {
  const [path] = useLocation();
  const places = useRef(new Map<string, number>());
  useLayoutEffect(() => {
    const known = places.current;
    const wanted = wentBack ? (known.get(path) ?? 0) : 0;
    wentBack = false;
    const keep = () => known.set(path, scrollY);
    // A list gets its height only once its answer is there. Whoever scrolls meanwhile goes where they like.
    const until = performance.now() + 5000;
    let frame = 0;
    const place = () => {
      scrollTo(0, wanted);
      if (Math.abs(scrollY - wanted) > 2 && performance.now() < until) frame = requestAnimationFrame(place);
      else begin();
    };
    const begin = () => {
      stop();
      addEventListener("scroll", keep, { passive: true });
    };
    const stop = () => {
      cancelAnimationFrame(frame);
      for (const name of ["wheel", "touchstart", "keydown"]) removeEventListener(name, begin);
    };
    for (const name of ["wheel", "touchstart", "keydown"]) addEventListener(name, begin, { passive: true });
    place();
    return () => {
      stop();
      removeEventListener("scroll", keep);
    };
  }, [path]);
  const search = useSearch();
  useLayoutEffect(() => void (wentBack = false), [search]);
}

function Nowhere() {
  useTitle("Not found");
  return (
    <Blank title="There is no such page">
      <p>The address may be from another version.</p>
      <div className="actions">
        <Link href={embedded ? embedded.home : "/"}>Go to the start</Link>
      </div>
    </Blank>
  );
}

/** An error of a page leaves the frame usable. */
class Guard extends Component<{ children: ReactNode }, { failed: string }> {
  override state = { failed: "" };
  static getDerivedStateFromError(error: unknown) {
    return { failed: String(error) };
  }
  override render() {
    if (!this.state.failed) return this.props.children;
    return (
      <Blank icon="warn" title="This page cannot be drawn" alert>
        <p>{this.state.failed}</p>
        <p>Please report it with the address of this page.</p>
        <div className="actions">
          <Link href="/">All sources</Link>
        </div>
      </Blank>
    );
  }
}
