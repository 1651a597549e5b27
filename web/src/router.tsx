/** Addresses of pages: the path and query of the URL, or what follows `#` where a report is opened from a file. */
import { useCallback, useMemo, useSyncExternalStore, type ReactNode } from "react";
import { Router, useLocation, useSearch, type BaseLocationHook, type BaseSearchHook } from "wouter";
import { embedded } from "./data";

const wait = (changed: () => void) => {
  addEventListener("hashchange", changed);
  addEventListener("popstate", changed);
  return () => {
    removeEventListener("hashchange", changed);
    removeEventListener("popstate", changed);
  };
};

const inHash = () => (location.hash.startsWith("#/") ? location.hash.slice(1) : "/");

const useHashLocation: BaseLocationHook = () => {
  const at = useSyncExternalStore(wait, inHash);
  const navigate = useCallback((to: string, options?: { replace?: boolean }) => {
    if (to === inHash()) return;
    if (options?.replace) {
      history.replaceState(null, "", "#" + to);
      dispatchEvent(new HashChangeEvent("hashchange"));
    } else location.hash = to;
  }, []);
  return [at.split("?")[0] ?? "/", navigate];
};
useHashLocation.hrefs = (href: string) => "#" + href;

const useHashSearch: BaseSearchHook = () => useSyncExternalStore(wait, inHash).split("?")[1] ?? "";

export function Routes({ children }: { children: ReactNode }) {
  if (!embedded) return <Router>{children}</Router>;
  return (
    <Router hook={useHashLocation} searchHook={useHashSearch} hrefs={useHashLocation.hrefs}>
      {children}
    </Router>
  );
}

/** The query of the page's address, and a function that changes some of its parameters ("" removes one). */
export function useQuery(): [URLSearchParams, (change: Record<string, string>, options?: { push?: boolean }) => void] {
  const search = useSearch();
  const [path, navigate] = useLocation();
  const query = useMemo(() => new URLSearchParams(search), [search]);
  const change = useCallback(
    (values: Record<string, string>, options?: { push?: boolean }) => {
      const next = new URLSearchParams(search);
      for (const [name, value] of Object.entries(values)) value ? next.set(name, value) : next.delete(name);
      const text = next.toString();
      navigate(path + (text ? "?" + text : ""), { replace: !options?.push });
    },
    [search, path, navigate],
  );
  return [query, change];
}

/** A path with its parts escaped: to("runs", id). */
export function to(...parts: (string | number)[]): string {
  return "/" + parts.map((part) => encodeURIComponent(part)).join("/");
}
