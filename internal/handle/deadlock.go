package handle

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// name returns a name for the row of resource that all processes share. It differs from the names of the same key
// of another kind, or in another lock table.
func (l *Locks) name(resource strategy.Resource) string {
	if !resource.Traits.Table {
		return resource.Strategy + resource.Row
	}
	return l.table.String() + resource.Row
}

// held returns the names of the resources that a caller has, without slots: another holder can give a slot
// back.
func (l *Locks) held(resources []strategy.Resource) (names []string) {
	for _, resource := range resources {
		if resource.Slots == 0 {
			names = append(names, l.name(resource))
		}
	}
	return names
}

const (
	// circleAfter is how long a caller waits before it looks for a deadlock with another process, and
	// circleEvery how often it looks from then on.
	circleAfter, circleEvery = 3 * time.Second, time.Second
	// mostPairs is for how many pairs of a held and a wanted key it looks.
	mostPairs = 16
)

// watchCircles ends deadlocks between two processes, in which each of two callers holds the key for which
// the other one waits. One of the two gives way.
//
// A caller whose wanted key comes after the key that it holds shows its wait, by a named lock of the server.
// A caller whose wanted key comes before looks for such a named lock, and gives way if there is one. So it is
// always the same of the two, and a caller does not give way to one that waits for nobody. watchCircles calls
// end if the caller is to give way.
func (l *Locks) watchCircles(ctx context.Context, held []string, wanted []strategy.Resource, end func(error)) {
	var show, look []string
	for _, has := range held {
		for _, resource := range wanted {
			switch name := l.name(resource); {
			case resource.Slots > 0 || name == has || len(show)+len(look) >= mostPairs:
			case has < name:
				show = append(show, lockname.OfWait(l.namespace, has, name))
			default:
				look = append(look, lockname.OfWait(l.namespace, name, has))
			}
		}
	}
	if len(show)+len(look) == 0 {
		return
	}
	var shows []func()
	defer func() {
		for _, release := range shows {
			release()
		}
	}()
	tick := time.NewTimer(circleAfter)
	defer tick.Stop()
	for ; ; tick.Reset(circleEvery) {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		show = slices.DeleteFunc(show, func(name string) bool {
			release, ok := l.advisories.Show(ctx, name)
			if ok {
				shows = append(shows, release)
			}
			return ok
		})
		if len(look) > 0 {
			if other := l.shown(ctx, look); other != "" {
				end(queue.Deadlock(fmt.Sprintf("the holder of the key waits for a key that this caller holds,"+
					" as connection %s of its process says", other)))
				return
			}
		}
	}
}

// shown returns the id of a connection that has one of the named locks; "" if there is none.
func (l *Locks) shown(ctx context.Context, names []string) string {
	ctx, cancel := server.Within(ctx, circleEvery)
	defer cancel()
	c, err := l.Control.Acquire(ctx)
	if err != nil {
		return ""
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, "SELECT COALESCE(IS_USED_LOCK('"+strings.Join(names, "'), IS_USED_LOCK('")+"'))")
	if err != nil || len(rows) != 1 {
		return ""
	}
	return rows[0][0]
}
