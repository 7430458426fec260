package main

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// standBeside is a stand whose callers get a lock each ten milliseconds, beside b.
func standBeside(b *beside) *stand {
	return &stand{client: &work{do: func(context.Context, int, string) error { time.Sleep(10 * time.Millisecond); return nil }, beside: b}}
}

func TestCallsBesideALoadAreTimedAlsoThoseWithoutAnAnswer(t *testing.T) {
	s := standBeside(&beside{
		ping: func(context.Context) error { time.Sleep(5 * time.Millisecond); return nil },
		read: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, // as one that waits for a connection all the time
	})
	o := order{Workers: 2, Lasting: 100 * time.Millisecond, Patience: 300 * time.Millisecond, Beside: 10 * time.Millisecond}
	r, err := s.load(t.Context(), o)
	dbtest.OK(t, err)
	for name, took := range map[string][]time.Duration{"pings": r.Beside.Pings, "reads": r.Beside.Reads} {
		if n := len(took); n < 2 || n > 11 {
			t.Fatalf("%d %s in 100 ms, of which one is begun each 10 ms", n, name)
		}
	}
	if least := slices.Min(r.Beside.Pings); least < 5*time.Millisecond {
		t.Errorf("a ping took %v, want 5 ms at least", least)
	}
	if longest := slices.Max(r.Beside.Reads); longest < 200*time.Millisecond {
		t.Errorf("the longest read took %v, and none had an answer for 300 ms and more", longest)
	}
	if r.All == 0 {
		t.Error("no grant beside them")
	}

	o.Beside = 0
	r, err = s.load(t.Context(), o)
	dbtest.OK(t, err)
	if n := len(r.Beside.Pings) + len(r.Beside.Reads); n > 0 {
		t.Errorf("%d calls beside a load that asks for none", n)
	}
}

func TestACallBesideALoadThatFailsFailsTheLoad(t *testing.T) {
	fine := func(context.Context) error { return nil }
	fails := func(context.Context) error { return errors.New("no such table") }
	for name, b := range map[string]*beside{"a ping": {fails, fine}, "a read": {fine, fails}} {
		o := order{Workers: 1, Lasting: 20 * time.Millisecond, Patience: time.Second, Beside: time.Millisecond}
		_, err := standBeside(b).load(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), "no such table") {
			t.Errorf("%s fails beside a load: %v", name, err)
		}
	}
}

// TestFiguresBesideALoadAreOfAllProcesses: with reports of two, one of which had to wait.
func TestFiguresBesideALoadAreOfAllProcesses(t *testing.T) {
	b := &bench{results: new(results)}
	c := contender{Name: inBegin + fewEach, Server: onMySQL}
	quick, slow := make([]time.Duration, 50), make([]time.Duration, 50)
	for i := range quick {
		quick[i], slow[i] = time.Millisecond, time.Duration(i+1)*10*time.Millisecond
	}
	w := loads{workload: rush, workers: 100, rush: inRush, beside: besideEvery, lasting: time.Second}
	b.fileBeside(w, c, []report{{Beside: timed{quick, slow}}, {Beside: timed{slow, quick}}})
	l := label{rush, 100, 0, c.Name, c.Server}
	for _, figure := range []string{pingLate, readLate} {
		if got := b.results.median(l, figure); math.Abs(got-490.1) > 0.01 {
			t.Errorf("%q is %v, want 490.1", figure, got)
		}
	}
	if n := len(b.results.values[l]); n > 2 {
		t.Errorf("%d figures of a round with calls beside it, want 2", n)
	}
}
