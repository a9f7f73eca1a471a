/* drafter.h - one conversation's draft state: drafter.c is its life, draft_eagle.c,
   draft_medusa.c and draft_model.c what the kinds of head keep and do. */
#ifndef ES_DRAFTER_H
#define ES_DRAFTER_H

#include <stdbool.h>
#include <stdint.h>

#include "draft_eagle.h"
#include "draft_history.h"
#include "draft_medusa.h"
#include "draft_model.h"
#include "draft_net.h"
#include "edgespec.h"
#include "head.h"

struct es_drafter {
    es_head *head;
    es_draft_net net;
    bool is_drafting;              /* between begin and end */
    es_history history;
    es_eagle *eagle;               /* of an EAGLE head */
    es_medusa *medusa;             /* of a Medusa head */
    es_small *small;               /* of a small model */
};

#endif
